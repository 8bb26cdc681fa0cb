"""Hardware as its makers state it: devices, links, topology. Without jax."""
