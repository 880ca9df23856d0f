"""What makes, gates, applies, reverts and reports changes to other packages. It knows none of them.

A patch file imports the kinds of declarations from here.
"""

from .edits import DeleteAttribute, Rewrite, SetAttribute
from .patch import CannotShow, Finding, Message, Part, Patch

__all__ = ["CannotShow", "DeleteAttribute", "Finding", "Message", "Part", "Patch", "Rewrite", "SetAttribute"]
