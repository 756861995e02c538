"""``torch.compile`` runs our methods as they are: traced, a call on a stream would be functionalized, and its memory recorded for
a tensor that is not there. ``torch.compiler.disable`` would do, too, but imports the compiler, which takes seconds."""

import types


def leave_untraced(*modules):
    """Marks every function of ``modules``, and the functions nested in it."""
    mark = _mark()
    if mark is None:
        return
    for module in modules:
        for value in vars(module).values():
            if getattr(value, "__module__", None) == module.__name__:
                for code in _codes(value):
                    mark(code)


def _mark():
    try:
        from torch._C._dynamo import eval_frame
    except ImportError:
        return None  # before torch 2
    if hasattr(eval_frame, "set_code_exec_strategy"):
        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        return lambda code: eval_frame.set_code_exec_strategy(code, strategy)
    return getattr(eval_frame, "skip_code", None)


def _codes(value):
    if isinstance(value, type):
        for member in vars(value).values():
            yield from _codes(member)
    elif isinstance(value, property):
        for function in filter(None, (value.fget, value.fset)):
            yield from _codes(function)
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _codes(value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _codes(value.__code__)
    elif isinstance(value, types.CodeType):
        yield value
        for constant in value.co_consts:
            if isinstance(constant, types.CodeType):
                yield from _codes(constant)
