"""Loads of an engine that counts every token: what kneewatch says of them."""
