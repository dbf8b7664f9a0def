//! Version 3 without being told any port.

use std::{
    env,
    process::{Command, Stdio},
};

use berth_nfs::{Change, Nfs, Version};

use super::server::{Server, chain};

const INSIDE: &str = "BERTH_NFS_INSIDE_NETWORK";

/// The portmapper has one port for the whole machine, so the test runs once more in a network of its own.
#[test]
#[expect(clippy::disallowed_methods, reason = "the test starts itself again")]
fn ports_that_are_not_given_are_asked_of_the_portmapper() {
    if env::var_os(INSIDE).is_some() {
        return inside();
    }
    let output = Command::new("unshare")
        .args(["--net", "sh", "-c", r#"ip link set lo up && exec "$0" --exact "$1" --nocapture"#])
        .arg(env::current_exe().unwrap())
        .arg("portmapper::ports_that_are_not_given_are_asked_of_the_portmapper")
        .env(INSIDE, "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[tokio::main(flavor = "current_thread")]
async fn inside() {
    let server = Server::with(&["portmapper=here"]);
    for versions in [vec![Version::V3], Version::ALL.to_vec()] {
        let mut target = server.target(Version::V3);
        (target.options.port, target.options.mount_port) = (None, None);
        // Nothing listens on 2049, so version 4 is not there.
        target.options.versions = versions;
        let share = Nfs::new().share(&target).await.unwrap_or_else(|error| panic!("{}", chain(&error)));
        assert_eq!(share.version(), Version::V3);
        share.make_dirs("a/b", &Change::default()).await.unwrap();
    }
    assert!(server.export().join("a/b").is_dir());
}
