"""What is optimized how: the optimizer, groups of parameters, and what a resume takes over."""

import ast
import difflib
import fnmatch
import inspect
import logging
import math
import types
import typing

import torch
from torch import nn

from plumbing.comm import SettingsError

logger = logging.getLogger(__name__)

NORM_LAYERS = nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm
STACKS = nn.Sequential, nn.ModuleList

UNSUITABLE = {
    "LBFGS": "evaluates the loss several times in a step (by a closure): the loop does it once",
    "SparseAdam": "takes sparse gradients only, of all parameters: Adam takes those of the loop",
}
# Arguments that have a setting of their own, and those that are chosen for the machine.
SETTINGS = {
    "lr": "BASE_LR",
    "weight_decay": "WEIGHT_DECAY",
    "momentum": "MOMENTUM",
    "nesterov": "NESTEROV",
    "betas": "BETAS",
}
CHOSEN = {
    "params": "they are those of the model",
    "fused": "it is on where there is such a kernel; foreach=True turns it off",
    "capturable": "it is on for GPUs where the optimizer is not fused",
    "differentiable": "it is off: no step is differentiated",
}
# What some arguments, when they are on, keep of each parameter; it starts at zero.
STATE_OF = {"momentum": "momentum_buffer", "amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}


def build_optimizer(cfg, model):
    """The optimizer, whose state is saved and resumed by the names of the parameters.

    Raises:
        SettingsError: a setting cannot work, or not with this model.
    """
    kind, arguments = setup_optimizer(cfg)
    if "capturable" in arguments:  # otherwise some read their state from the GPU in each step
        arguments["capturable"] = cfg.MODEL.DEVICE == "cuda"
    groups = build_parameter_groups(cfg, model)
    try:
        optimizer = kind(groups, **arguments)
    except ValueError as error:
        reason, other = " ".join(str(error).split()), "SGD or AdamW takes any parameters"
        raise SettingsError(f"SOLVER.OPTIMIZER: {kind.__name__}: {reason}: {other}") from None
    # The fused SGD leaves them uninitialized if the very first step is left out.
    if isinstance(optimizer, torch.optim.SGD) and cfg.SOLVER.MOMENTUM > 0:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.register_state_dict_post_hook(save_kind)
    optimizer.register_load_state_dict_pre_hook(keep_settings_on_load)
    table = describe_groups(model, optimizer)
    logger.info("Groups of parameters for %s:\n%s", kind.__name__, table)
    return optimizer


def setup_optimizer(cfg):
    """The class of the optimizer and its arguments, after a step with them on one parameter.

    It may be any in torch.optim or this file that can do with one gradient.

    Raises:
        SettingsError: names the setting, its value and what is possible.
    """
    solver = cfg.SOLVER
    name, text = solver.OPTIMIZER, solver.OPTIMIZER_ARGS
    classes = {each.__name__: each for each in _subclasses(torch.optim.Optimizer)}
    if name in UNSUITABLE:
        raise SettingsError(f"SOLVER.OPTIMIZER: {name} {UNSUITABLE[name]}")
    known = sorted(classes.keys() - UNSUITABLE.keys())
    if name not in known:
        near = _nearest(name, known)
        one_of = ", ".join(known)
        raise SettingsError(f"SOLVER.OPTIMIZER: {name!r}: did you mean {near}?  One of {one_of}")

    kind, parameters = classes[name], inspect.signature(classes[name], eval_str=True).parameters
    settings = {
        "lr": solver.BASE_LR,
        "weight_decay": solver.WEIGHT_DECAY,
        "momentum": solver.MOMENTUM,
        "nesterov": solver.NESTEROV,
        "betas": tuple(solver.BETAS),
    }
    for key, value, argument in (
        ("WEIGHT_DECAY", solver.WEIGHT_DECAY, "weight_decay"),
        ("WEIGHT_DECAY_NORM", solver.WEIGHT_DECAY_NORM, "weight_decay"),
        ("WEIGHT_DECAY_BIAS", solver.WEIGHT_DECAY_BIAS, "weight_decay"),
        ("NESTEROV", solver.NESTEROV, "nesterov"),
    ):
        if argument not in parameters and value > 0:
            off = type(value)(0)
            raise SettingsError(f"SOLVER.{key}: {value}: {name} has no {argument}: set {off}")

    arguments = {key: value for key, value in settings.items() if key in parameters}
    arguments.update(parse_arguments(text, name, parameters))
    if "fused" in parameters and "foreach" not in arguments:
        arguments["fused"] = True
    elif "foreach" in parameters and name != "Adafactor":  # which is chosen to save memory
        arguments.setdefault("foreach", True)
    if "capturable" in parameters and "fused" not in arguments:
        arguments["capturable"] = False

    trial = nn.Parameter(torch.zeros(1, 1))
    trial.grad = torch.zeros(1, 1)
    try:
        kind([trial], **arguments).step()
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        key, value = ("OPTIMIZER_ARGS", text) if text else ("OPTIMIZER", name)
        reason = " ".join(str(error).split())
        raise SettingsError(f"SOLVER.{key}: {value!r}: {name} refuses it: {reason}") from None
    if solver.NONFINITE == "skip" and "fused" not in arguments:
        fused = [each for each in known if "fused" in inspect.signature(classes[each]).parameters]
        one_of = ", ".join(fused)
        raise SettingsError(f"SOLVER.NONFINITE: 'skip' needs a fused optimizer, one of {one_of}")
    return kind, arguments


def parse_arguments(text, name, parameters):
    """The dict that "eps=1e-6, amsgrad=True" stands for, checked for ``parameters`` of a class."""
    key = "SOLVER.OPTIMIZER_ARGS"
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        arguments = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        named = not call.args and None not in arguments and len(arguments) == len(call.keywords)
        possible = named and isinstance(call.func, ast.Name)
    except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        possible = False
    if not possible:
        raise SettingsError(f"{key}: {text!r} must be as in Python: eps=1e-6, amsgrad=True")
    free = sorted(parameters.keys() - SETTINGS.keys() - CHOSEN.keys())
    for argument, value in arguments.items():
        if argument in SETTINGS:
            raise SettingsError(f"{key}: {argument}: set SOLVER.{SETTINGS[argument]} instead")
        if argument in CHOSEN and argument in parameters:
            chosen = f"is chosen in optimizer.py, so leave it out: {CHOSEN[argument]}"
            raise SettingsError(f"{key}: {argument}: {chosen}")
        if argument not in free:
            takes = f"did you mean {_nearest(argument, free)}?  It takes {', '.join(free)}"
            raise SettingsError(f"{key}: {argument}: {name} has no such argument: {takes}")
        wanted = parameters[argument].annotation
        if not _fits(value, wanted):
            wanted = inspect.formatannotation(wanted)
            raise SettingsError(f"{key}: {argument}: {value!r} must be {wanted}")
    return arguments


def build_parameter_groups(cfg, model):
    """One group of named parameters for each learning rate and weight decay.

    The rate is BASE_LR times the factors that apply: for a bias BIAS_LR_FACTOR, then that of
    LR_FACTORS, then LAYER_DECAY for each layer above (see layer_numbers).  Norm layers have a decay
    of their own, for all their parameters; so have the biases elsewhere; WEIGHT_DECAY_FACTORS
    multiplies it.  Frozen parameters are left out, a shared one counts once, by its first name.
    Groups with BASE_LR itself come first: the rate that is logged is that of the first group.
    """
    solver = cfg.SOLVER
    model = _bare(model)
    names = [name for name, _ in model.named_parameters()]
    lr_factors = match_factors(names, "SOLVER.LR_FACTORS", solver.LR_FACTORS)
    decay_factors = match_factors(names, "SOLVER.WEIGHT_DECAY_FACTORS", solver.WEIGHT_DECAY_FACTORS)
    layers = layer_numbers(model)
    top = max(layers.values(), default=0)
    if top == 0 and solver.LAYER_DECAY < 1:
        rule = "counts layers in nn.Sequential and nn.ModuleList, and this model has none"
        raise SettingsError(f"SOLVER.LAYER_DECAY: {solver.LAYER_DECAY}: {rule}: set 1.0")
    groups, seen = {}, set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or parameter in seen:
                continue
            seen.add(parameter)
            full_name = f"{module_name}.{name}".removeprefix(".")
            lr, decay = solver.BASE_LR, solver.WEIGHT_DECAY
            if "bias" in name.split("_"):  # in_proj_bias and bias_ih_l0 too
                lr *= solver.BIAS_LR_FACTOR
                decay = decay if solver.WEIGHT_DECAY_BIAS < 0 else solver.WEIGHT_DECAY_BIAS
            if isinstance(module, NORM_LAYERS):
                decay = solver.WEIGHT_DECAY_NORM
            lr *= lr_factors[full_name] * solver.LAYER_DECAY ** (top - layers[parameter])
            decay *= decay_factors[full_name]
            group = groups.setdefault((lr, decay), {"lr": lr, "weight_decay": decay, "params": []})
            group["params"].append((full_name, parameter))
    if not groups:
        raise SettingsError("SOLVER.OPTIMIZER: the model has no parameter that is to be trained")
    return sorted(groups.values(), key=lambda group: group["lr"] != solver.BASE_LR)


def match_factors(names, key, rules):
    """{name: factor} by ``rules`` such as "features.*=0.1"; 1.0 where none matches.

    A pattern is one of the shell (fnmatch), for the whole name: "*" matches dots too.  The first
    rule that matches a name counts.

    Raises:
        SettingsError: a rule is none, or would have no effect.
    """
    factors = {}
    for rule in rules:
        pattern, factor = split_rule(key, rule)
        found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not found:
            modules = {f"{name[:i]}.*" for name in names for i, c in enumerate(name) if c == "."}
            near = _nearest(pattern, [*names, *sorted(modules)])
            raise SettingsError(f"{key}: {rule!r} matches no parameter: did you mean {near}?")
        if factors.keys() >= set(found):
            raise SettingsError(f"{key}: {rule!r} comes after rules for all that it matches")
        factors.update((name, factor) for name in found if name not in factors)
    return {name: factors.get(name, 1.0) for name in names}


def split_rule(key, rule):
    """("features.*", 0.1) of "features.*=0.1"."""
    pattern, _, factor = rule.rpartition("=") if isinstance(rule, str) else ("", "", "")
    try:
        factor = float(factor)
    except ValueError:
        factor = -1.0
    if not pattern or not 0 <= factor < math.inf:
        rule = f"{rule!r} must be PATTERN=FACTOR with a number that is 0 or more"
        raise SettingsError(f"{key}: {rule}, such as 'features.*=0.1'")
    return pattern.strip(), factor


def layer_numbers(model):
    """{parameter: number of its layer}, in the order in which the modules were registered.

    Layers 1, 2, ... are the children that hold parameters of each nn.Sequential and nn.ModuleList;
    where such a child is one itself, its children instead; what is inside a layer counts no
    further.  A norm layer among them belongs to the layer before it.  Outside of them, parameters
    belong to layer 0 if they come before layer 1 (patches, positions, tokens), and else to the
    layer before them; those after the last layer (norm, head) are a layer of their own, the top.
    For a vision transformer that are the layers of BEiT (Bao et al., 2021, as ELECTRA, Clark et
    al., 2020): embedding 0, "blocks.3." 4, head the number of blocks plus 1.
    """
    found, count = {}, 0

    def visit(module, inside):
        nonlocal count
        for parameter in module.parameters(recurse=False):
            found.setdefault(parameter, (count, inside))
        for child in module.children():
            in_stack = isinstance(module, STACKS) and not isinstance(child, STACKS) and not inside
            if in_stack and not isinstance(child, NORM_LAYERS):
                count += any(parameter not in found for parameter in child.parameters())
            visit(child, inside or in_stack)

    visit(model, False)
    return {
        parameter: number + (number == count and count > 0 and not inside)
        for parameter, (number, inside) in found.items()
    }


def describe_groups(model, optimizer):
    """A table with a line for each group of parameters; the rates are those before the schedule."""
    keys = "lr", "weight_decay", "param_names", "params"
    rows = [tuple(group[key] for key in keys) for group in optimizer.param_groups]
    rows = [(f"{lr:.4g}", f"{decay:.4g}", *rest) for lr, decay, *rest in rows]
    frozen = {n: p for n, p in _bare(model).named_parameters() if not p.requires_grad}
    rows += [("frozen", "", list(frozen), frozen.values())] if frozen else []
    lines = [f"{'lr':>10} {'decay':>10} {'tensors':>8} {'parameters':>12}  names"]
    for lr, decay, names, parameters in rows:
        size = sum(parameter.numel() for parameter in parameters)
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        lines.append(f"{lr:>10} {decay:>10} {len(names):>8} {size:>12,}  {some}")
    return "\n".join(lines)


def save_kind(optimizer, state):
    """Keep the name of the class: that of Adam and of AdamW look the same."""
    state["kind"] = type(optimizer).__name__


def keep_settings_on_load(optimizer, saved):
    """On a resume the state comes from the file, by parameter names; the settings stay.

    Raises:
        SettingsError: it is the state of another optimizer.
    """
    kind = type(optimizer).__name__
    saved_kind = saved.get("kind", kind)
    if saved_kind != kind:
        advice = f"go back to {saved_kind}, or start elsewhere with the file as MODEL.WEIGHTS"
        raise SettingsError(f"SOLVER.OPTIMIZER: {kind}: {saved_kind} was saved: {advice}")
    named = [zip(group["param_names"], group["params"]) for group in saved["param_groups"]]
    state_of = {name: saved["state"].get(i, {}) for group in named for name, i in group}
    groups = optimizer.state_dict()["param_groups"]
    state, new = {}, []
    for group, own in zip(groups, optimizer.param_groups):
        for i, name, parameter in zip(group["params"], own["param_names"], own["params"]):
            if saved["state"] and not state_of.get(name):
                new.append(name)
            state[i] = dict(optimizer.state.get(parameter, {}))
            for key, value in state_of.get(name, {}).items():
                state[i][key] = _laid_out_like(parameter, value)
            for argument, key in STATE_OF.items():
                if not group.get(argument):
                    state[i].pop(key, None)
                elif state[i]:
                    state[i].setdefault(key, torch.zeros_like(parameter))
    if new:
        logger.warning("The optimizer starts anew for %s", ", ".join(new))
    return {"state": {i: s for i, s in state.items() if s}, "param_groups": groups}


def _laid_out_like(parameter, value):
    """The fused kernels walk through memory: a state needs the strides of its parameter."""
    if getattr(value, "shape", None) != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _subclasses(kind):
    """Those of torch.optim and of this file, at any depth."""
    for each in kind.__subclasses__():
        if each.__module__.startswith(("torch.optim", __name__)):
            yield each
        yield from _subclasses(each)


def _fits(value, wanted):
    """Whether a value is what an annotation asks for; a number must be finite."""
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(wanted))
    if typing.get_origin(wanted) is tuple:
        parts = typing.get_args(wanted)
        right = isinstance(value, tuple) and len(value) == len(parts)
        return right and all(_fits(item, part) for item, part in zip(value, parts))
    if wanted in (int, float):
        kinds = (int, float) if wanted is float else int
        return isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    known = isinstance(wanted, type) and wanted is not inspect.Parameter.empty
    return not known or isinstance(value, wanted)


def _nearest(word, known):
    spelt = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), spelt, 1, cutoff=0.0)
    return spelt[near[0]] if near else "none"


def _bare(model):
    """The model without what DataParallel, DistributedDataParallel and compile add."""
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    while isinstance(model, parallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, parallel) else model._orig_mod
    return model
