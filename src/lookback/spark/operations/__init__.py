"""Operates a deployment: set-up, grants, status, maintenance, retention, privacy requests and notifications."""
