"""The base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Immutable, strict about types, and a key it does not know is an error.

    Validators reject; they never assign. Derived numbers live in `config/plan.py`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
