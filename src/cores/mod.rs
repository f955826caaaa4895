//! Which core each thread runs on.
//!
//! The kernel's online and isolated sets, the cpuset and the CPU quota decide, not the inherited affinity, which
//! leaves isolated cores out. [`plan`] is a pure function of what [`Machine::read`] saw and the configuration asks.

#![forbid(unsafe_code)]

mod machine;

use std::collections::BTreeSet;
use std::fmt;

pub use machine::Machine;

/// Cores asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Chosen by kvlane, at most so many where a number is given.
    Auto(Option<usize>),
    /// These.
    List(Vec<usize>),
}

/// What the configuration asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// `[shards] cores` and `count`: one shard per core.
    pub shards: Wish,
    /// `[ingest] cores`.
    pub ingest: Wish,
    /// `[control] core`; none = auto.
    pub control: Option<usize>,
}

impl Default for Wishes {
    fn default() -> Self {
        Wishes { shards: Wish::Auto(None), ingest: Wish::Auto(None), control: None }
    }
}

/// Which thread runs where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// One shard on each.
    pub shards: Vec<usize>,
    /// Ingest threads.
    pub ingest: Vec<usize>,
    /// Control thread and helpers.
    pub control: usize,
    /// What the operator should know: cores shared by threads that want one each.
    pub notes: Vec<String>,
}

/// A wish that this machine cannot fulfil.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CoreError {
    /// No such core, or it is switched off.
    #[error("core {core} is not online (online: {})", Set(.online))]
    Offline {
        /// The option.
        option: &'static str,
        /// The core.
        core: usize,
        /// What is online.
        online: BTreeSet<usize>,
    },
    /// The container or service may not run there.
    #[error("core {core} is outside the cpuset of this process ({})", Set(.cpuset))]
    OutsideCpuset {
        /// The option.
        option: &'static str,
        /// The core.
        core: usize,
        /// What the process may use.
        cpuset: BTreeSet<usize>,
    },
    /// A core stands in a list twice.
    #[error("core {core} is listed twice")]
    Twice {
        /// The option.
        option: &'static str,
        /// The core.
        core: usize,
    },
    /// A list without cores.
    #[error("the list names no core")]
    Empty {
        /// The option.
        option: &'static str,
    },
    /// More shards than the quota lets run at once.
    #[error("{asked} cores are listed, and the CPU quota of this process lets {quota_milli} thousandths of a core run")]
    BeyondQuota {
        /// The option.
        option: &'static str,
        /// Cores listed.
        asked: usize,
        /// The quota, thousandths of a core.
        quota_milli: u64,
    },
    /// More shards than there are cores for them.
    #[error("{asked} shards are asked for, and {usable} cores are usable for shards")]
    TooMany {
        /// The option.
        option: &'static str,
        /// Shards asked for.
        asked: usize,
        /// Cores usable for shards.
        usable: usize,
    },
}

impl CoreError {
    /// The configuration option the error is about.
    #[must_use]
    pub fn option(&self) -> &'static str {
        match self {
            CoreError::Offline { option, .. }
            | CoreError::OutsideCpuset { option, .. }
            | CoreError::Twice { option, .. }
            | CoreError::Empty { option }
            | CoreError::BeyondQuota { option, .. }
            | CoreError::TooMany { option, .. } => option,
        }
    }
}

/// A set of cores as the kernel writes it: `0-3,8`.
struct Set<'a>(&'a BTreeSet<usize>);

impl fmt::Display for Set<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cores = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(first) = cores.next() {
            let mut last = first;
            while cores.next_if_eq(&(last + 1)).is_some() {
                last += 1;
            }
            if first == last {
                write!(f, "{separator}{first}")?
            } else {
                write!(f, "{separator}{first}-{last}")?
            }
            separator = ",";
        }
        Ok(())
    }
}

/// Decides which thread runs where.
///
/// # Errors
/// Every wish that cannot be fulfilled.
pub fn plan(machine: &Machine, wishes: &Wishes) -> Result<Plan, Vec<CoreError>> {
    let errors = check(machine, wishes);
    if !errors.is_empty() {
        return Err(errors);
    }
    let (auto_shards, auto_ingest, auto_control) = auto(machine, wishes);
    let shards = match &wishes.shards {
        Wish::List(list) => list.clone(),
        Wish::Auto(None) => auto_shards,
        Wish::Auto(Some(count)) if *count <= auto_shards.len() => auto_shards[..*count].to_vec(),
        Wish::Auto(Some(count)) => {
            let usable = auto_shards.len();
            return Err(vec![CoreError::TooMany { option: "shards.count", asked: *count, usable }]);
        }
    };
    let ingest = match &wishes.ingest {
        Wish::List(list) => list.clone(),
        Wish::Auto(_) => vec![auto_ingest],
    };
    let control = wishes.control.unwrap_or(auto_control);
    let notes = notes(machine, &shards, &ingest, control);
    Ok(Plan { shards, ingest, control, notes })
}

fn check(machine: &Machine, wishes: &Wishes) -> Vec<CoreError> {
    let mut errors = Vec::new();
    let lists = [("shards.cores", &wishes.shards), ("ingest.cores", &wishes.ingest)];
    for (option, wish) in lists {
        let Wish::List(list) = wish else { continue };
        if list.is_empty() {
            errors.push(CoreError::Empty { option });
        }
        let mut seen = BTreeSet::new();
        for core in list {
            errors.extend(unusable(machine, option, *core));
            if !seen.insert(*core) {
                errors.push(CoreError::Twice { option, core: *core });
            }
        }
    }
    if let Some(core) = wishes.control {
        errors.extend(unusable(machine, "control.core", core));
    }
    if let (Wish::List(list), Some(quota_milli)) = (&wishes.shards, machine.quota_milli)
        && list.len() as u64 > quota_milli.div_ceil(1000).max(1)
    {
        errors.push(CoreError::BeyondQuota { option: "shards.cores", asked: list.len(), quota_milli });
    }
    errors
}

fn unusable(machine: &Machine, option: &'static str, core: usize) -> Option<CoreError> {
    if !machine.online.contains(&core) {
        return Some(CoreError::Offline { option, core, online: machine.online.clone() });
    }
    match &machine.cpuset {
        Some(cpuset) if !cpuset.contains(&core) => {
            Some(CoreError::OutsideCpuset { option, core, cpuset: cpuset.clone() })
        }
        _ => None,
    }
}

/// Cores for shards, ingest and control where the configuration leaves them to us.
fn auto(machine: &Machine, wishes: &Wishes) -> (Vec<usize>, usize, usize) {
    let usable = machine.usable();
    let named: BTreeSet<usize> = match &wishes.ingest {
        Wish::List(list) => list.iter().copied().chain(wishes.control).collect(),
        Wish::Auto(_) => wishes.control.into_iter().collect(),
    };
    let isolated: Vec<usize> = usable.iter().copied().filter(|c| machine.isolated.contains(c)).collect();
    if !isolated.is_empty() {
        let rest: Vec<usize> = usable.iter().copied().filter(|c| !machine.isolated.contains(c)).collect();
        let shards: Vec<usize> = isolated.iter().copied().filter(|c| !named.contains(c)).collect();
        let (ingest, control) = match rest.as_slice() {
            [] => (isolated[isolated.len() - 1], isolated[isolated.len() - 1]),
            [.., control] if rest.len() == 1 => (*control, *control),
            [.., ingest, control] => (*ingest, *control),
            [only] => (*only, *only),
        };
        return (if shards.is_empty() { isolated } else { shards }, ingest, control);
    }
    let allowed = machine.quota_milli.map_or(usize::MAX, |milli| ((milli / 1000) as usize).max(1));
    let taken: Vec<usize> = usable.into_iter().take(allowed).collect();
    match taken.as_slice() {
        [] => (vec![0], 0, 0),
        [only] => (vec![*only], *only, *only),
        [first, second] => (vec![*first], *second, *second),
        [shards @ .., ingest, control] => {
            let free: Vec<usize> = shards.iter().copied().filter(|c| !named.contains(c)).collect();
            (if free.is_empty() { shards.to_vec() } else { free }, *ingest, *control)
        }
    }
}

fn notes(machine: &Machine, shards: &[usize], ingest: &[usize], control: usize) -> Vec<String> {
    let mut notes = Vec::new();
    for core in shards {
        if ingest.contains(core) {
            notes.push(format!("core {core} is shared by a shard and ingest: both want one of their own"));
        } else if *core == control {
            notes.push(format!("core {core} is shared by a shard and the control thread"));
        }
    }
    if ingest.contains(&control) {
        notes.push(format!("core {control} is shared by ingest and the control thread"));
    }
    if !machine.isolated.is_empty() && !shards.iter().any(|core| machine.isolated.contains(core)) {
        notes.push(format!("no shard runs on an isolated core (isolated: {})", Set(&machine.isolated)));
    }
    notes
}

#[cfg(test)]
mod tests;
