"""What axe-core, the rules of WCAG as a script, has to say against a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import needs

if TYPE_CHECKING:
    from playwright.sync_api import Page


def violations(page: Page) -> list[str]:
    """Every rule that the page breaks as it is now, with the first element that does."""
    found = needs.axe().Axe().run(page).response["violations"]
    return [f"{rule['id']}: {rule['help']}: {rule['nodes'][0]['html'][:200]}" for rule in found]
