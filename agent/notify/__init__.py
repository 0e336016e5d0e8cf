"""Telling people: webhooks, Slack, e-mail."""
