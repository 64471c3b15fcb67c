"""The launcher of an SGLang server and the stand-ins that let it run on a plain CPU.

Both files are self-contained scripts: they run under the server's interpreter, which need not have
megatrl installed.
"""
