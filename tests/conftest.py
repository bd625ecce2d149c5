"""Settings of all tests."""

import os

import hypothesis

# CPU time on shared machines says nothing about a test; and continuous integration must say the same thing twice.
hypothesis.settings.register_profile("laminar", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("laminar")
