//! csi-sanity against the controller. Publishing needs a kernel that mounts NFS, which the suite in a virtual machine has.

use crate::{
    server::{Server, VERSIONS},
    suite,
};

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_conforms() {
    for version in VERSIONS {
        let server = Server::start(version, &[]);
        let dir = server.dir().join("sanity");
        std::fs::create_dir(&dir).unwrap();
        let outcome =
            suite::run(&dir, server.backend().await, &server.class(&[]), "Node Service|should work").await;
        eprintln!("version {version}: {} passed, {} skipped", outcome.passed, outcome.skipped);
        assert!(outcome.passed > 45, "{} passed", outcome.passed);
        let left: Vec<_> = std::fs::read_dir(server.export())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .filter(|name| name != ".berth")
            .collect();
        assert!(left.is_empty(), "the suite deletes what it makes: {left:?}");
    }
}
