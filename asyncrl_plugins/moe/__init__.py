"""Models of experts: routing of the engine replayed in the learner, losses and load of the routers."""
