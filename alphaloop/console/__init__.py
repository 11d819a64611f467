"""The console: a web page that shows what `status`, `explain`, `drift` and `report` show, from the same functions.

A view reads, and makes a `Page`: data, and the template that shows them. The same data are the page's JSON twin.
"""
