"""The error tree: every failure that a caller is expected to plan for.

Ports raise exactly three of these for what lies between two services: `PeerLost`, `DeadlinePassed`, `Fenced`.
"""


class LaminarError(Exception):
    """Base of all errors that Laminar raises on purpose; its text is one sentence for the user."""


class UserError(LaminarError):
    """Something the user gave cannot work: config, file, flag. The command line prints it and exits with code 2."""


class ConfigError(UserError):
    """A config key is unknown, missing or contradicts another; the text names the dotted path."""


class RunFailed(LaminarError):
    """The run cannot go on; the text says what happened and what to do. The command line exits with code 1."""


class PortError(LaminarError):
    """A call to a neighbouring service did not succeed."""


class PeerLost(PortError):
    """The service at the other end died or cannot be reached; the call may or may not have taken effect."""


class DeadlinePassed(PortError):
    """No answer within the deadline; the call may or may not have taken effect."""


class Fenced(PortError):
    """The caller acts under a lease, attempt or epoch that was given to somebody else; it must let go."""


class WeightsUnavailable(PortError):
    """The relay does not hold the version asked for."""
