"""When a number is bad: rules as data, states over time, the cascade."""
