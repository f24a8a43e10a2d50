"""The former place of closing.py, which rdma/ still imports."""

from .closing import Closing as Closing
