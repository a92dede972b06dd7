"""The private parts of pytest (8.4 to 9.2) that make a rank treat test modules as pytest does."""

# Without it a failing assert on a rank shows no values.
from _pytest.assertion import install_importhook as _install_importhook

# Without it a warning on a rank would go unseen.
from _pytest.config import apply_warning_filters as apply_warning_filters, get_config


def rewrite_asserts() -> None:
    """Make test modules that this process imports from now on explain their asserts."""
    _install_importhook(get_config())
