"""No simulated service may leave work of the compiled core to the Python one."""

from tests.core.fallbacks import no_fallbacks as no_fallbacks
