"""Pages and pictures of the command line; nothing here computes what it draws.

`meshpar.html` writes an HTML file; `plan_page`, `show_page` and `audit_page` fill it.
plotly draws in pages, where pointing at a bar explains it; matplotlib draws files, as
it needs no browser for them. Both belong to the extra plots.
"""
