//! What this machine and this process's control groups allow, as files of the kernel say.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Cores that exist and may be used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Cores that are switched on.
    pub online: BTreeSet<usize>,
    /// Cores that the scheduler leaves to those who ask for them.
    pub isolated: BTreeSet<usize>,
    /// Cores the control group may use; none = no such bound is known.
    pub cpuset: Option<BTreeSet<usize>>,
    /// CPU quota of the control group, thousandths of a core; none = no bound.
    pub quota_milli: Option<u64>,
}

impl Machine {
    /// Reads this machine.
    #[must_use]
    pub fn read() -> Self {
        Self::read_under(Path::new("/"))
    }

    /// Reads the same files below another root.
    #[must_use]
    pub fn read_under(root: &Path) -> Self {
        let list = |path: &str| fs::read_to_string(root.join(path)).ok().and_then(|text| parse_list(&text));
        let fallback = || (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        Machine {
            online: list("sys/devices/system/cpu/online").filter(|set| !set.is_empty()).unwrap_or_else(fallback),
            isolated: list("sys/devices/system/cpu/isolated").unwrap_or_default(),
            cpuset: read_cpuset(root, &groups),
            quota_milli: read_quota(root, &groups),
        }
    }

    /// Cores that are online and in the cpuset, ascending.
    #[must_use]
    pub fn usable(&self) -> Vec<usize> {
        let allowed = |core: &usize| self.cpuset.as_ref().is_none_or(|set| set.contains(core));
        self.online.iter().copied().filter(allowed).collect()
    }
}

/// A kernel list such as `0-3,8`; none where it is something else.
fn parse_list(text: &str) -> Option<BTreeSet<usize>> {
    let mut cores = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // The bound keeps a damaged file from filling memory; Linux has no machine with so many cores.
        if last >= 65_536 {
            return None;
        }
        cores.extend(first..=last);
    }
    Some(cores)
}

/// Path of this process's group in the hierarchy of a controller (version 1), or in the unified one (`""`).
fn group_path<'a>(groups: &'a str, controller: &str) -> Option<&'a str> {
    groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        controllers.split(',').any(|name| name == controller).then_some(path)
    })
}

/// The group's directory and those above it, innermost first. In a container the path may be that of the host,
/// and only the mount's root exists: it is then the group.
fn group_dirs(mount: &Path, path: &str) -> Vec<PathBuf> {
    let relative = Path::new(path.trim_start_matches('/'));
    relative.ancestors().map(|dir| mount.join(dir)).filter(|dir| dir.is_dir()).collect()
}

fn read_cpuset(root: &Path, groups: &str) -> Option<BTreeSet<usize>> {
    let mount = root.join("sys/fs/cgroup");
    let unified = group_path(groups, "").map(|path| group_dirs(&mount, path)).unwrap_or_default();
    let separate = group_path(groups, "cpuset").map(|path| group_dirs(&mount.join("cpuset"), path)).unwrap_or_default();
    let first = |dirs: &[PathBuf], names: &[&str]| {
        dirs.iter()
            .flat_map(|dir| names.iter().map(move |name| dir.join(name)))
            .find_map(|file| fs::read_to_string(file).ok().and_then(|text| parse_list(&text)))
            .filter(|set| !set.is_empty())
    };
    first(&unified, &["cpuset.cpus.effective"]).or_else(|| first(&separate, &["cpuset.effective_cpus", "cpuset.cpus"]))
}

fn read_quota(root: &Path, groups: &str) -> Option<u64> {
    let mount = root.join("sys/fs/cgroup");
    let unified = group_path(groups, "").map(|path| group_dirs(&mount, path)).unwrap_or_default();
    let separate = group_path(groups, "cpu").map(|path| group_dirs(&mount.join("cpu"), path)).unwrap_or_default();
    // Every group on the way up bounds what is below it.
    let version2 = unified.iter().filter_map(|dir| {
        let text = fs::read_to_string(dir.join("cpu.max")).ok()?;
        let (quota, period) = text.trim().split_once(' ')?;
        milli(quota.parse().ok()?, period.parse().ok()?)
    });
    let version1 = separate.iter().filter_map(|dir| {
        let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<i64>().ok();
        milli(u64::try_from(number("cpu.cfs_quota_us")?).ok()?, u64::try_from(number("cpu.cfs_period_us")?).ok()?)
    });
    version2.chain(version1).min()
}

fn milli(quota_us: u64, period_us: u64) -> Option<u64> {
    quota_us.checked_mul(1000)?.checked_div(period_us)
}
