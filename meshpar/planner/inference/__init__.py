"""Memory of generation under a layout, and time of prefill and decode."""
