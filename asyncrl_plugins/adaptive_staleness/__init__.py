"""A staleness bound that moves with what the steps measure."""
