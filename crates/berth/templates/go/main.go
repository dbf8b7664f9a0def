// @NAME@ is a CSI driver whose volumes are directories below ROOT, bound into pods. It keeps the size of a volume in a file beside it.
package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	name        = "@DRIVER@"
	version     = "0.1.0"
	defaultSize = 1 << 30
)

type driver struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	root, node string
	mutex      sync.Mutex // One call at a time is enough for directories.
}

func main() {
	endpoint := os.Getenv("CSI_ENDPOINT")
	socket := strings.TrimPrefix(endpoint, "unix://")
	if socket == endpoint || socket == "" {
		log.Fatal("CSI_ENDPOINT must be unix:///path/to.sock")
	}
	d := &driver{root: or(os.Getenv("ROOT"), "/var/lib/@NAME@"), node: or(os.Getenv("NODE_ID"), hostname())}
	if err := os.MkdirAll(d.root, 0o755); err != nil {
		log.Fatal(err)
	}
	_ = os.Remove(socket) // Left by a process that was killed.
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, d)
	csi.RegisterControllerServer(server, d)
	csi.RegisterNodeServer(server, d)
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	go func() { <-stop; server.GracefulStop() }()
	log.Printf("%s %s serves %s", name, version, endpoint)
	if err := server.Serve(listener); err != nil {
		log.Fatal(err)
	}
}

func or(text, otherwise string) string {
	if text == "" {
		return otherwise
	}
	return text
}

func hostname() string {
	host, _ := os.Hostname()
	return host
}

// Identity

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: name, VendorVersion: version}, nil
}

func (d *driver) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	service := &csi.PluginCapability_Service{Type: csi.PluginCapability_Service_CONTROLLER_SERVICE}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{Type: &csi.PluginCapability_Service_{Service: service}}}}, nil
}

func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

// Controller

// A volume's id is a digest of its name, so that a repeated call finds it, and no name leads out of the root.
func idOf(name string) string { return fmt.Sprintf("vol-%x", sha256.Sum256([]byte(name)))[:36] }

var ids = regexp.MustCompile(`^vol-[0-9a-f]{32}$`)

type record struct {
	Size int64 `json:"size"`
}

func (d *driver) recordOf(id string) (*record, error) {
	text, err := os.ReadFile(filepath.Join(d.root, id+".json"))
	if errors.Is(err, fs.ErrNotExist) || !ids.MatchString(id) {
		return nil, nil
	}
	if err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	found := &record{}
	return found, json.Unmarshal(text, found)
}

func (d *driver) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	rpc := &csi.ControllerServiceCapability_RPC{Type: csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: []*csi.ControllerServiceCapability{{Type: &csi.ControllerServiceCapability_Rpc{Rpc: rpc}}}}, nil
}

func unsupported(capabilities []*csi.VolumeCapability) string {
	for _, capability := range capabilities {
		if capability.GetMount() == nil {
			return "only filesystem volumes are supported"
		}
		if capability.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN {
			return "the access mode is missing"
		}
	}
	return ""
}

func (d *driver) CreateVolume(_ context.Context, request *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	required, limit := request.GetCapacityRange().GetRequiredBytes(), request.GetCapacityRange().GetLimitBytes()
	switch why := unsupported(request.GetVolumeCapabilities()); {
	case request.GetName() == "":
		return nil, status.Error(codes.InvalidArgument, "the name is missing")
	case len(request.GetVolumeCapabilities()) == 0:
		return nil, status.Error(codes.InvalidArgument, "the volume capabilities are missing")
	case why != "":
		return nil, status.Error(codes.InvalidArgument, why)
	case request.GetVolumeContentSource() != nil:
		return nil, status.Error(codes.InvalidArgument, "content sources are not supported")
	case limit != 0 && limit < required || required < 0 || limit < 0:
		return nil, status.Error(codes.OutOfRange, "the limit is smaller than what is required")
	}
	for key := range request.GetParameters() {
		if !strings.HasPrefix(key, "csi.storage.k8s.io/") {
			return nil, status.Errorf(codes.InvalidArgument, "the parameter %q is not known", key)
		}
	}
	id, size := idOf(request.GetName()), required
	if size == 0 {
		size = defaultSize
		if limit != 0 {
			size = min(size, limit)
		}
	}
	found, err := d.recordOf(id)
	if err != nil {
		return nil, err
	}
	if found != nil && (found.Size < required || limit != 0 && found.Size > limit) {
		return nil, status.Errorf(codes.AlreadyExists, "there is a volume of this name with %d bytes", found.Size)
	}
	if found == nil {
		// The record comes first: what has none is never removed.
		text, _ := json.Marshal(record{Size: size})
		if err := os.WriteFile(filepath.Join(d.root, id+".json"), text, 0o600); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		found = &record{Size: size}
	}
	if err := os.MkdirAll(filepath.Join(d.root, id), 0o777); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id, CapacityBytes: found.Size}}, nil
}

func (d *driver) DeleteVolume(_ context.Context, request *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	id := request.GetVolumeId()
	if id == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume id is missing")
	}
	if !ids.MatchString(id) {
		return &csi.DeleteVolumeResponse{}, nil
	}
	for _, path := range []string{filepath.Join(d.root, id), filepath.Join(d.root, id+".json")} {
		if err := os.RemoveAll(path); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	return &csi.DeleteVolumeResponse{}, nil
}

func (d *driver) ValidateVolumeCapabilities(_ context.Context, request *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if request.GetVolumeId() == "" || len(request.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "the volume id or the capabilities are missing")
	}
	if found, err := d.recordOf(request.GetVolumeId()); err != nil || found == nil {
		return nil, status.Errorf(codes.NotFound, "there is no volume %q", request.GetVolumeId())
	}
	if why := unsupported(request.GetVolumeCapabilities()); why != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: why}, nil
	}
	confirmed := &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeCapabilities: request.GetVolumeCapabilities()}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: confirmed}, nil
}

// Node

func (d *driver) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: d.node}, nil
}

func (d *driver) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func isMounted(target string) (bool, error) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	escaped := strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`).Replace(target)
	return strings.Contains(string(table), " "+escaped+" "), err
}

func (d *driver) NodePublishVolume(_ context.Context, request *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	id, target := request.GetVolumeId(), filepath.Clean(request.GetTargetPath())
	switch {
	case id == "" || request.GetTargetPath() == "" || request.GetVolumeCapability() == nil:
		return nil, status.Error(codes.InvalidArgument, "the volume id, the target path or the capability is missing")
	case request.GetVolumeCapability().GetMount() == nil:
		return nil, status.Error(codes.InvalidArgument, "only filesystem volumes are supported")
	}
	if found, err := d.recordOf(id); err != nil || found == nil {
		return nil, status.Errorf(codes.NotFound, "there is no volume %q", id)
	}
	if mounted, err := isMounted(target); err == nil && mounted && isReadOnly(target) != readOnly(request) {
		return nil, status.Errorf(codes.AlreadyExists, "%q is mounted already, and not as it is asked for", target)
	}
	if err := d.bind(filepath.Join(d.root, id), target, readOnly(request)); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

func isReadOnly(target string) bool {
	var found syscall.Statfs_t
	return syscall.Statfs(target, &found) == nil && found.Flags&syscall.MS_RDONLY != 0
}

func readOnly(request *csi.NodePublishVolumeRequest) bool {
	mode := request.GetVolumeCapability().GetAccessMode().GetMode()
	return request.GetReadonly() || mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY ||
		mode == csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
}

func (d *driver) bind(source, target string, readOnly bool) error {
	if mounted, err := isMounted(target); err != nil || mounted {
		return err
	}
	if err := os.MkdirAll(target, 0o750); err != nil {
		return err
	}
	if err := syscall.Mount(source, target, "", syscall.MS_BIND, ""); err != nil {
		return err
	}
	if !readOnly {
		return nil
	}
	// A bind becomes read-only by a second call; without it nothing may stay that can be written.
	err := syscall.Mount("", target, "", syscall.MS_BIND|syscall.MS_REMOUNT|syscall.MS_RDONLY, "")
	if err != nil {
		_ = syscall.Unmount(target, 0)
	}
	return err
}

func (d *driver) NodeUnpublishVolume(_ context.Context, request *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if request.GetVolumeId() == "" || request.GetTargetPath() == "" {
		return nil, status.Error(codes.InvalidArgument, "the volume id or the target path is missing")
	}
	target := filepath.Clean(request.GetTargetPath())
	if mounted, err := isMounted(target); err != nil {
		return nil, status.Error(codes.Internal, err.Error())
	} else if mounted {
		if err := syscall.Unmount(target, 0); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
	}
	if err := os.Remove(target); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, status.Error(codes.Internal, err.Error())
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}
