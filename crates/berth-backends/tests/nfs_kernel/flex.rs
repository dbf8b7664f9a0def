//! FlexVolume drivers with the kernel's client: a script of somebody else's through the adapter, and `berth flex`.

use std::{collections::BTreeMap, fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use berth_backends::{
    Context, NodeVolume, Sources as _, TargetMounts as _,
    flex::{Config, Flex},
    services::Mode,
};
use berth_core::AccessMode;
use berth_host::mount::Attributes;

use crate::kernel::{EXPORT, Scratch, capability, program, run, serve};

const SCRIPT: &str = include_str!("../../../../testbed/flex/nfs.sh");

fn volume(share: &str) -> NodeVolume {
    let options = [("server", "127.0.0.1"), ("share", share), ("mountOptions", "vers=4.2")];
    NodeVolume {
        id: "pv-flex-nfs".parse().unwrap(),
        capability: capability(AccessMode::MultiNodeMultiWriter),
        read_only: false,
        context: options.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        publish_context: BTreeMap::new(),
        staging: None,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_mounts_shares_through_the_adapter() {
    serve();
    let scratch = Scratch::new();
    let plugin = scratch.path().join("k8s~nfs/nfs");
    fs::create_dir_all(plugin.parent().unwrap()).unwrap();
    fs::write(scratch.path().join("script"), SCRIPT).unwrap();
    run("cp", &[&scratch.path().join("script").display().to_string(), &plugin.display().to_string()]);
    fs::set_permissions(&plugin, fs::Permissions::from_mode(0o755)).unwrap();
    let config = Config {
        plugin,
        node: "node-1".parse().unwrap(),
        state_dir: scratch.path().join("state"),
        call_timeout: Duration::from_secs(60),
    };
    let flex = Flex::start(config, Mode::All).await.unwrap();
    assert!(!flex.attaches());
    let target = scratch.path().join("pod");
    for share in ["/", ""] {
        fs::create_dir_all(&target).unwrap();
        let source = flex.source(&Context::default(), &volume(share)).await.unwrap();
        flex.bind(&source, &target, Attributes::default()).await.unwrap();
        let mounts = scratch.mounts();
        assert!(mounts.len() == 1 && mounts[0].fs_type.starts_with("nfs"), "{mounts:?}");
        fs::write(target.join("by-the-script"), share).unwrap();
        assert_eq!(fs::read_to_string(Path::new(EXPORT).join("by-the-script")).unwrap(), share);
        flex.unmount(&target).await.unwrap();
        assert!(scratch.mounts().is_empty(), "{:?}", scratch.mounts());
    }
}

#[test]
fn berth_mounts_shares_by_the_kernel() {
    serve();
    let scratch = Scratch::new();
    let text = |name: &str| scratch.path().join(name).display().to_string();
    let berth = program().display().to_string();
    let (plugins, state, target) = (text("plugins"), text("state"), text("pod"));
    run(&berth, &["flex", "install", "--plugin-dir", &plugins, "--state-dir", &state, "--mount-mode=kernel"]);
    let driver = text("plugins/k8s~nfs/nfs");
    let document =
        r#"{"kubernetes.io/fsType":"nfs","server":"127.0.0.1","share":"/","mountOptions":"vers=4.2"}"#;
    for _ in 0..2 {
        run(&driver, &["mount", &target, document]);
    }
    let mounts = scratch.mounts();
    assert!(mounts.len() == 1 && mounts[0].fs_type.starts_with("nfs"), "{mounts:?}");
    fs::write(scratch.path().join("pod/by-berth"), "here").unwrap();
    assert_eq!(fs::read_to_string(Path::new(EXPORT).join("by-berth")).unwrap(), "here");
    for _ in 0..2 {
        run(&driver, &["unmount", &target]);
    }
    assert!(scratch.mounts().is_empty(), "{:?}", scratch.mounts());
    assert!(
        fs::read_dir(scratch.path().join("state/nfs"))
            .unwrap()
            .flatten()
            .all(|entry| entry.file_name() == "mounts")
    );
}
