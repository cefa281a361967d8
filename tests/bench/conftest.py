"""No figure may be that of a compiled core which leaves work to the Python one."""

from tests.core.fallbacks import no_fallbacks as no_fallbacks
