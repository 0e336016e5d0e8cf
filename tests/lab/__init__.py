"""The opt-in live test: kneewatch against a real vLLM on CPU (`make lab`)."""
