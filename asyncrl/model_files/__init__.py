"""Files of a model folder, or its download from the hub. No torch."""
