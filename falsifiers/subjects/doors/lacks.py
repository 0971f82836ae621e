"""What a door is: reasons not to have it, and objects whose methods are further questions."""


class Lacks(Exception):  # noqa: N818  # a reason not to run, no error
    """The subject has no such door, or cannot do here what is asked; the text says why."""


class Session:
    """Base of an object that a door opens and whose methods are further questions: a pipeline, a ledger, a stream of tokens."""
