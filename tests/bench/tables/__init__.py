"""`make tables`: published results of hybrid models on tiers and fleets, reproduced on the product's core in virtual time."""
