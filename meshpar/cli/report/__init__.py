"""Reports in one HTML file: tables and plots that need nothing beside them."""
