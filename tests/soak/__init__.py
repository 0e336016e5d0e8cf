"""What holds for months, tried in minutes: each program prints its figures and fails where a
promise of docs/explanation/reliability.md is broken."""
