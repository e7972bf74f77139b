"""What the tests share: rank pools, the reference trainer, small models."""
