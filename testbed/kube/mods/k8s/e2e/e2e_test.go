// Package e2e is Kubernetes' end-to-end suite with the storage specs alone, which also lists how each spec ended.
package e2e

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"k8s.io/kubernetes/test/e2e"
	_ "k8s.io/kubernetes/test/e2e/feature"
	"k8s.io/kubernetes/test/e2e/framework"
	"k8s.io/kubernetes/test/e2e/framework/config"
	_ "k8s.io/kubernetes/test/e2e/framework/debug/init"
	_ "k8s.io/kubernetes/test/e2e/framework/metrics/init"
	_ "k8s.io/kubernetes/test/e2e/framework/node/init"
	"k8s.io/kubernetes/test/e2e/framework/testfiles"
	_ "k8s.io/kubernetes/test/e2e/storage"
	_ "k8s.io/kubernetes/test/e2e/storage/csimock"
	_ "k8s.io/kubernetes/test/e2e/storage/external"
	manifests "k8s.io/kubernetes/test/e2e/testing-manifests"
	_ "k8s.io/kubernetes/test/utils/format"
)

var results = flag.String("results", "", "a file that gets one line per spec: state, seconds, name")

func TestMain(m *testing.M) {
	config.CopyFlags(config.Flags, flag.CommandLine)
	framework.RegisterCommonFlags(flag.CommandLine)
	framework.RegisterClusterFlags(flag.CommandLine)
	flag.Parse()
	framework.AfterReadingAllFlags(&framework.TestContext)
	// Files below --repo-root come before the suite's own of the same path.
	if root := framework.TestContext.RepoRoot; root != "" {
		testfiles.AddFileSource(testfiles.RootFileSource{Root: root})
	}
	testfiles.AddFileSource(manifests.GetE2ETestingManifestsFS())
	os.Exit(m.Run())
}

func TestE2E(t *testing.T) { e2e.RunE2ETests(t) }

var _ = ginkgo.ReportAfterSuite("list of specs", func(report ginkgo.Report) {
	// The suite goes through all specs without running them first.
	if *results == "" || report.SuiteConfig.DryRun {
		return
	}
	file, err := os.Create(*results)
	framework.ExpectNoError(err)
	defer file.Close()
	for _, spec := range report.SpecReports {
		ended := spec.State != types.SpecStateSkipped || spec.Failure.Message != ""
		if spec.LeafNodeType == types.NodeTypeIt && ended {
			fmt.Fprintf(file, "%s\t%.0f\t%s\n", spec.State, spec.RunTime.Seconds(), spec.FullText())
		}
	}
})
