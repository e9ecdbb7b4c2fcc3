"""Forecasts of links, predicted step times, and plans that probe links out of sight."""
