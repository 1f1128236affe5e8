"""Plans jobs for hardware that is not present: `plan("qwen2-vl-7b", topology="v5e:4x4", prompt=8192, ...)`.

chips       specifications of chips, and names of topologies
questions   shapes of prompts of a given length
programs    compiles for absent chips, and reads the compiler's analysis
arithmetic  choice of the mesh, changes that would fit, and times of programs
jobs        the programs of one policy
planning    `plan`
report      a plan as a table and as JSON
"""

from vlkv.tools.planning.chips import CHIPS
from vlkv.tools.planning.jobs import Run, Step
from vlkv.tools.planning.planning import Plan, plan
from vlkv.tools.planning.report import as_json, as_table

__all__ = ["CHIPS", "Plan", "Run", "Step", "as_json", "as_table", "plan"]
