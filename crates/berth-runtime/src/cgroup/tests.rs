//! What is written to control groups, and what is read from them.

use super::*;

fn mounted(fs_type: &str, target: &Path, super_options: &str) -> mount::MountInfo {
    mount::MountInfo {
        id: 1,
        parent: 1,
        device: (0, 1),
        root: "/".into(),
        target: target.to_owned(),
        fs_type: fs_type.to_owned(),
        source: "cgroup".to_owned(),
        options: "rw".to_owned(),
        is_shared: false,
        super_options: super_options.to_owned(),
    }
}

fn id() -> ContainerId {
    ContainerId { pod_uid: "u".to_owned(), name: "c".to_owned(), attempt: 2 }
}

#[test]
fn hierarchies_are_found_among_the_mounts() {
    let v1 = [
        mounted("cgroup", Path::new("/c/cpu,cpuacct"), "rw,cpu,cpuacct"),
        mounted("cgroup", Path::new("/c/cpuset"), "rw,cpuset"),
        mounted("cgroup", Path::new("/c/memory"), "rw,memory"),
        mounted("cgroup", Path::new("/elsewhere/memory"), "rw,memory"),
        mounted("cgroup2", Path::new("/nowhere"), "rw"),
    ];
    let expected = Machine::V1(vec![
        ("/c/cpu,cpuacct".into(), vec![Controller::Cpu, Controller::Accounting]),
        ("/c/memory".into(), vec![Controller::Memory]),
    ]);
    assert_eq!(Machine::find(&v1), Ok(expected));
    let missing = Machine::find(&v1[..2]).unwrap_err();
    assert_eq!(missing, "this machine has no control group hierarchy with the memory controller mounted");

    let root = tempfile::tempdir().unwrap();
    let unified = [mounted("cgroup2", root.path(), "rw")];
    fs::write(root.path().join("cgroup.controllers"), "hugetlb\n").unwrap();
    assert!(Machine::find(&unified).is_err());
    fs::write(root.path().join("cgroup.controllers"), "cpuset cpu io memory pids\n").unwrap();
    assert_eq!(Machine::find(&unified), Ok(Machine::V2(root.path().to_owned())));
}

#[test]
fn limits_of_version_2_are_written_to_its_files() {
    let root = tempfile::tempdir().unwrap();
    let groups = Cgroups {
        machine: Machine::V2(root.path().to_owned()),
        name: "b".to_owned(),
        changing: Mutex::default(),
    };
    let group = root.path().join("b").join(own_group(&id()));
    let files = ["cpu.weight", "cpu.max", "memory.max", "memory.swap.max", "pids.max"];
    fs::create_dir_all(&group).unwrap();
    for file in files {
        fs::write(group.join(file), "").unwrap();
    }
    let limits =
        Limits { cpu_shares: Some(1024), cpu_millis: Some(1500), memory: Some(1 << 20), pids: Some(7) };
    groups.make(&own_group(&id()), &limits).unwrap();
    let written = files.map(|file| fs::read_to_string(group.join(file)).unwrap());
    assert_eq!(written, ["39", "150000 100000", "1048576", "0", "7"]);
    // A limit that cannot be written is an error that says so.
    fs::remove_file(group.join("memory.max")).unwrap();
    let error = groups.limit(&own_group(&id()), &limits).unwrap_err().sentence();
    assert!(error.contains("write 1048576 to") && error.contains("memory.max"), "{error}");

    for (file, text) in [
        ("cpu.stat", "usage_usec 2000\nuser_usec 1\n"),
        ("memory.current", "9000\n"),
        ("memory.stat", "anon 5000\nfile 4000\ninactive_file 3000\n"),
        ("pids.current", "4\n"),
    ] {
        fs::write(group.join(file), text).unwrap();
    }
    let usage = Usage { cpu: 2_000_000, memory: 9000, working_set: 6000, anonymous: 5000, pids: 4 };
    assert_eq!(groups.usage(&id()), Some(usage));
}

#[test]
fn a_kill_for_want_of_memory_is_read_from_the_events() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let events = OwnedFd::from(fs::File::open(file.path()).unwrap());
    for (text, expected) in [
        ("low 0\noom 1\noom_kill 0\noom_group_kill 0\n", false),
        ("low 0\noom 1\noom_kill 2\noom_group_kill 1\n", true),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", true),
        ("oom_kill_disable 1\nunder_oom 0\n", false),
        ("", false),
    ] {
        fs::write(file.path(), text).unwrap();
        assert_eq!(was_out_of_memory(&events), expected, "{text:?}");
    }
}

#[test]
fn weights_span_the_whole_range() {
    for (shares, expected) in [(2, 1), (1024, 39), (2048, 79), (262_144, 10_000)] {
        assert_eq!(weight(shares), expected);
    }
}
