"""Pictures and pages: drawn by matplotlib (files) and plotly (pages), an extra."""
