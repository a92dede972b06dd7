from . import found_plans as found_plans
