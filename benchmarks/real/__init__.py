"""Published checkpoints that can be installed as packages, and measurements on them."""
