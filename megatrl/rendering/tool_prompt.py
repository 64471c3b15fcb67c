"""How tools are announced to the policy in the system message (the layout Qwen3 was trained on)."""

import json
from collections.abc import Sequence

from megatrl.data.messages import ToolSpec

_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def qwen_tool_prompt(tools: Sequence[ToolSpec]) -> str:
    """The tools section of a system message, one JSON object a line."""
    lines = []
    for tool in tools:
        parameters = dict(tool.parameters) or {"type": "object", "properties": {}}
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        lines.append("\n" + json.dumps({"type": "function", "function": function}, ensure_ascii=False))
    return _BEFORE + "".join(lines) + _AFTER
