"""The method ``diloco-decoupled``: workers that train at their own speed, and syncers that take their outer steps."""
