"""Tells optimum-cli of ``optimum-cli export speculative``.

This folder is optimum's namespace for commands of other distributions (PEP 420): no ``__init__.py``
here or above. It is imported whenever optimum-cli starts.
"""

from optimum.commands.export.base import ExportCommand

from specexport.optimum_command import SpeculativeExportCommand

REGISTER_COMMANDS = [(SpeculativeExportCommand, ExportCommand)]
