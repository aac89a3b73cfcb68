"""Research methods: estimators, losses, selections and their overlays, beside the core's."""
