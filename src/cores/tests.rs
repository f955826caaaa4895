use std::fs;
use std::path::Path;

use super::*;

fn machine(online: usize, isolated: &[usize], cpuset: Option<&[usize]>, quota_milli: Option<u64>) -> Machine {
    Machine {
        online: (0..online).collect(),
        isolated: isolated.iter().copied().collect(),
        cpuset: cpuset.map(|set| set.iter().copied().collect()),
        quota_milli,
    }
}

#[test]
fn auto_takes_isolated_cores_else_what_cpuset_and_quota_leave() {
    let cases: &[(Machine, &[usize], &[usize], usize)] = &[
        (machine(1, &[], None, None), &[0], &[0], 0),
        (machine(2, &[], None, None), &[0], &[1], 1),
        (machine(3, &[], None, None), &[0], &[1], 2),
        (machine(8, &[], None, None), &[0, 1, 2, 3, 4, 5], &[6], 7),
        (machine(8, &[], Some(&[2, 3, 5, 7]), None), &[2, 3], &[5], 7),
        (machine(8, &[], None, Some(2500)), &[0], &[1], 1),
        (machine(8, &[], None, Some(500)), &[0], &[0], 0),
        (machine(8, &[4, 5, 6, 7], None, None), &[4, 5, 6, 7], &[2], 3),
        (machine(4, &[1, 2, 3], None, None), &[1, 2, 3], &[0], 0),
        (machine(8, &[4, 5], Some(&[0, 1, 2]), None), &[0], &[1], 2),
    ];
    for (machine, shards, ingest, control) in cases {
        let plan = plan(machine, &Wishes::default()).expect("auto always fits");
        assert_eq!(
            (plan.shards.as_slice(), plan.ingest.as_slice(), plan.control),
            (*shards, *ingest, *control),
            "{machine:?}"
        );
    }
}

#[test]
fn a_core_that_cannot_be_used_is_named_with_the_reason() {
    let machine = machine(4, &[], Some(&[0, 1]), Some(1000));
    let wishes = Wishes { shards: Wish::List(vec![0, 1, 1]), ingest: Wish::List(vec![]), control: Some(9) };
    let errors = plan(&machine, &wishes).expect_err("nothing fits");
    let texts: Vec<String> = errors.iter().map(|e| format!("{}: {e}", e.option())).collect();
    assert_eq!(
        texts,
        [
            "shards.cores: core 1 is listed twice",
            "ingest.cores: the list names no core",
            "control.core: core 9 is not online (online: 0-3)",
            "shards.cores: 3 cores are listed, and the CPU quota of this process lets 1000 thousandths of a core run",
        ]
    );
    let wishes = Wishes { shards: Wish::List(vec![2]), ..Wishes::default() };
    let errors = plan(&machine, &wishes).expect_err("outside the cpuset");
    assert_eq!(errors[0].to_string(), "core 2 is outside the cpuset of this process (0-1)");
    let wishes = Wishes { shards: Wish::Auto(Some(2)), ..Wishes::default() };
    let errors = plan(&machine, &wishes).expect_err("too many");
    assert_eq!(errors[0].to_string(), "2 shards are asked for, and 1 cores are usable for shards");
}

#[test]
fn explicit_cores_are_taken_as_they_are_and_sharing_is_noted() {
    let wishes = Wishes { shards: Wish::List(vec![0, 1]), ingest: Wish::List(vec![1]), control: Some(0) };
    let plan = plan(&machine(2, &[], None, None), &wishes).expect("usable");
    assert_eq!((plan.shards, plan.ingest, plan.control), (vec![0, 1], vec![1], 0));
    assert_eq!(plan.notes.len(), 2, "{:?}", plan.notes);
    let wishes = Wishes { control: Some(0), ..Wishes::default() };
    let plan = super::plan(&machine(4, &[], None, None), &wishes).expect("usable");
    assert_eq!((plan.shards, plan.control), (vec![1], 0));
}

fn write(root: &Path, files: &[(&str, &str)]) {
    for (path, text) in files {
        let path = root.join(path);
        fs::create_dir_all(path.parent().expect("a file has a directory")).expect("a directory");
        fs::write(path, text).expect("a file");
    }
}

#[test]
fn both_versions_of_control_groups_are_read() {
    let base = std::env::temp_dir().join(format!("kvlane-cores-{}", std::process::id()));
    let cpu = [("sys/devices/system/cpu/online", "0-7\n"), ("sys/devices/system/cpu/isolated", "6-7\n")];

    let v2 = base.join("v2");
    write(&v2, &cpu);
    write(
        &v2,
        &[
            ("proc/self/cgroup", "0::/pods/one\n"),
            ("sys/fs/cgroup/pods/one/cpuset.cpus.effective", "0-3,6\n"),
            ("sys/fs/cgroup/pods/one/cpu.max", "max 100000\n"),
            ("sys/fs/cgroup/pods/cpu.max", "250000 100000\n"),
        ],
    );
    assert_eq!(Machine::read_under(&v2), machine(8, &[6, 7], Some(&[0, 1, 2, 3, 6]), Some(2500)));

    let v1 = base.join("v1");
    write(&v1, &cpu);
    write(
        &v1,
        &[
            // The host's path, of which the container sees the root alone.
            ("proc/self/cgroup", "3:cpuset:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n"),
            ("sys/fs/cgroup/cpuset/cpuset.cpus", "1,2\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ],
    );
    assert_eq!(Machine::read_under(&v1), machine(8, &[6, 7], Some(&[1, 2]), Some(1500)));

    let unbounded = base.join("unbounded");
    write(&unbounded, &cpu);
    write(
        &unbounded,
        &[
            ("proc/self/cgroup", "2:cpu:/\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
        ],
    );
    assert_eq!(Machine::read_under(&unbounded), machine(8, &[6, 7], None, None));
    fs::remove_dir_all(base).expect("the files are ours");
}

#[test]
fn this_machine_has_a_plan() {
    let machine = Machine::read();
    assert!(!machine.online.is_empty());
    plan(&machine, &Wishes::default()).expect("auto always fits");
}
