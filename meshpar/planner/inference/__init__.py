"""What generation takes under a layout: memory, time of prefill and decode."""
