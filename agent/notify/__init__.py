"""Notifications: webhooks, Slack, e-mail, and answers to Alertmanager's webhook."""
