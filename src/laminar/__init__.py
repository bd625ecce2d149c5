"""Reinforcement-learning post-training in which every trajectory runs at its own pace."""

__version__ = "0.1.0"
