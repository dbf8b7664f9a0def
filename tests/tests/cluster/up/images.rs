//! Volumes of the kind `image`: files of container images that the test makes itself.

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use berth_e2e::{machine, up::Machine};
use berth_testkit::oci::{OciLayout, TAR};

use super::{says, text, until_empty};

/// A pod that has an image at /image, and one directory of it at /part.
fn pod(name: &str, reference: &str, policy: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  terminationGracePeriodSeconds: 1\n  \
         containers:\n  - name: main\n    image: busybox\n    command: [sleep, '1000000']\n    \
         volumeMounts:\n    - {{name: image, mountPath: /image}}\n    - {{name: image, mountPath: /part, subPath: dir}}\n  \
         volumes: [{{name: image, image: {{reference: '{reference}', pullPolicy: {policy}}}}}]\n"
    )
}

/// A layer of what a script makes in an empty directory.
fn layer(dir: &Path, script: &str) -> Result<Vec<u8>> {
    let (tree, archive) = (dir.join("tree"), dir.join("layer.tar"));
    fs::create_dir(&tree)?;
    machine::run("sh", &["-c", &format!("cd '{}' && {script}", tree.display())])?;
    machine::run("tar", &["-cf", &archive.display().to_string(), "-C", &tree.display().to_string(), "."])?;
    fs::remove_dir_all(&tree)?;
    Ok(fs::read(&archive)?)
}

fn unpacked(machine: &Machine) -> usize {
    let directory = machine.data().join("node/plugins/kubernetes.io/image");
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_name() != "incoming").count()
}

#[test]
fn pods_read_the_files_of_an_image_and_it_goes_with_the_last_of_them() -> Result<()> {
    let mut machine = Machine::start()?;
    let dir = tempfile::tempdir()?;
    let mut layout = OciLayout::new(dir.path().join("layout"));
    let first = layer(
        dir.path(),
        "mkdir dir && echo below > dir/file && echo gone > dir/gone && cp /bin/true dir/run",
    )?;
    let second = layer(dir.path(), "mkdir dir && echo above > dir/file && touch dir/.wh.gone")?;
    let layers = [layout.add_blob(TAR, &first), layout.add_blob(TAR, &second)];
    let digest = layout.add_image("1.0", &layers);
    let reference = format!("oci:{}:1.0", layout.path().display());
    machine.apply(&[pod("one", &reference, "Always"), pod("two", &reference, "Always")].join("---\n"))?;
    for name in ["one", "two"] {
        machine.ready(name)?;
        ensure!(
            machine.exec(name, "cat /image/dir/file /part/file; ls /part")? == "above\nabove\nfile\nrun\n"
        );
        let refused = machine.exec(name, "touch /image/new 2>&1; /image/dir/run 2>&1; true")?;
        says(&refused, "Read-only file system")?;
        says(&refused, "Permission denied")?;
        let options = machine.exec(name, "grep ' /image ' /proc/mounts")?;
        for option in ["ro,", "nosuid", "nodev", "noexec"] {
            says(&options, option)?;
        }
    }
    says(&machine.event("Pod", "one", "Pulled")?, &digest)?;
    ensure!(unpacked(&machine) == 1, "one image is unpacked {} times", unpacked(&machine));

    machine.kill()?;
    machine.restart()?;
    machine.delete("pod/one")?;
    machine.ready("two")?;
    ensure!(machine.exec("two", "cat /part/file")? == "above\n" && unpacked(&machine) == 1);
    machine.delete("pod/two")?;
    machine.until("the image is removed", || Ok((unpacked(&machine) == 0).then_some(())))?;
    until_empty(&machine)?;
    machine.finish()
}

#[test]
fn an_image_that_is_not_on_the_machine_or_damaged_is_named_by_an_event() -> Result<()> {
    let machine = Machine::start()?;
    let dir = tempfile::tempdir()?;
    let mut layout = OciLayout::new(dir.path().join("layout"));
    let blob = layout.add_blob(TAR, &layer(dir.path(), "mkdir dir && echo text > dir/file")?);
    layout.add_image("registry.example/app:1", &[blob]);
    machine.apply(&pod("named", "registry.example/app:1", "IfNotPresent"))?;
    let message = machine.event("Pod", "named", "FailedMount")?;
    says(&message, "this node pulls no images")?;
    // Whoever puts it there is found without a restart.
    let images = machine.data().join("node/images");
    fs::create_dir_all(&images)?;
    machine::run("cp", &["-a", &layout.path().display().to_string(), &images.display().to_string()])?;
    machine.ready("named")?;
    ensure!(machine.exec("named", "cat /part/file")? == "text\n");
    let blob = layout.add_blob(TAR, &layer(dir.path(), "mkdir dir && echo other > dir/file")?);
    fs::write(layout.blob_path(text(&blob, "/digest")), "something else")?;
    layout.add_image("damaged", &[blob]);
    machine.apply(&pod("damaged", &format!("oci:{}:damaged", layout.path().display()), "Always"))?;
    says(&machine.event("Pod", "damaged", "FailedMount")?, "the blob is damaged")?;
    machine.delete("pod/named pod/damaged")?;
    until_empty(&machine)?;
    machine.finish()
}
