"""Link traces: the rate of a network path over time; read, write, generate, describe."""
