"""The engines whose pages are read: a folder each, and how a page is translated."""
