//! Devices execute what the planner laid out. They know no graph and no plan.

pub mod hexagon;
pub mod rknpu;
