"""`make tables`: published results of hybrid models on a fleet with tiers, on the product's core in virtual time."""
