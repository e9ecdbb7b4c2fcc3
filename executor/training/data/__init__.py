"""The data of training: what a scenario names, in an order that no plan changes, loaded ahead of the stages."""
