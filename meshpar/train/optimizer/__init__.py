"""What an optimizer does to each layer, read from its trace, and the layers stacked."""
